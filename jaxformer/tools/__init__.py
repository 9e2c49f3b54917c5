"""Tools that look at models and runs: nothing imports them but the command line."""
