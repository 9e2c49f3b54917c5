"""Text from a model: sampling rules, and the decode loop on the device."""
