"""What is shown of what was measured: tables, plots, the walk from stage to stage, the documents' generated parts."""
