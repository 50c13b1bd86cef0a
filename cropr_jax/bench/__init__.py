"""Speed: MACs, images per second, compile time, memory; `python -m cropr_jax.bench --help`."""
