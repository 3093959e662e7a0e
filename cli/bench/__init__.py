"""`cupyflash bench`: times attention and its peers."""
