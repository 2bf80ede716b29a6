"""Build the website of the evolution, with a page for each step. `make site` builds it from the repository, without a GPU."""
