"""These programs use stages. They need additional packages, which requirements.txt in this directory lists."""
