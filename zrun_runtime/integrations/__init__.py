"""Other people's names for the runtime: what is behind the `deepspeed` that scripts and trainers import."""
