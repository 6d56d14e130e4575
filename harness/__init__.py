"""The harness: takes claims to a scheduler, watches every rank, and brings their records home. Never imports k3."""
