"""How the embedded model was trained, checked and described."""
