"""How near a balanced split comes to the best one."""
