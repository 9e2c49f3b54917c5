"""Arrays and devices: the table of parameters, logical axes and meshes, and the hardware."""
