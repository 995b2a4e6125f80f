"""Every command behind a number of the documentation."""
