"""Programs for those who work on cupyflash; not part of the package."""
