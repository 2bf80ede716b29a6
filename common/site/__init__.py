"""Build the evolution as web pages, one for each step. `make site` builds them from the repository, without a GPU."""
