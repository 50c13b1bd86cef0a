"""Methods trained, evaluated and timed side by side: `python -m cropr_jax.compare`."""
