"""What stages are for: programs that use them, with packages of their own in requirements.txt."""
