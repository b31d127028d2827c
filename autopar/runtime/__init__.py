"""Running: compiled steps on devices, and what can be read off them."""
