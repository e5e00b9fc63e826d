"""Real processes under a seeded plan of what goes wrong; see ``docs/simulation.md``, last section."""
