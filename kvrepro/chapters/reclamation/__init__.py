"""The chapter on reclamation: from evicted tokens to blocks that a paged cache can give away again."""
