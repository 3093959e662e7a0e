"""Array libraries: one small adapter each, found among what the user has imported, imported by nobody here."""
