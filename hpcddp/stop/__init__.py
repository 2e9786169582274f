"""How a run ends: exit codes and the decision to stop. No torch."""
