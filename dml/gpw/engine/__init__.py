"""How the loss is computed: S in tiles, never whole."""
