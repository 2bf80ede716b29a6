"""Programs that use stages; requirements.txt has their additional packages."""
