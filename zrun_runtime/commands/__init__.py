"""Commands of `zrun` that need torch; found by the entry-point group `zrun.commands`."""
