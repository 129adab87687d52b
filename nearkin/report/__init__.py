"""What a run looks like to a person: tables for the terminal, one HTML page to look at."""
