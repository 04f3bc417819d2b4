"""Commands that generate with a target and a drafter."""
