"""Certificates: what was proven of a run, on the machine that it was made on."""
