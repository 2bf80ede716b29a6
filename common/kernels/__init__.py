"""Each module here has functions that several stages share."""
