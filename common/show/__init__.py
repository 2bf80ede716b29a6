"""Show the measurements: tables, plots, the walk from stage to stage, and generated parts of the documents."""
