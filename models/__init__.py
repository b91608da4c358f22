"""Model definitions that the scripts, tours and tests train: plain single-device code."""
