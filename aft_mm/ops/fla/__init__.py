"""fla-core's kernel of linear attention; `support` says what it serves and why not the rest."""
