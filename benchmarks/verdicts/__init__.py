"""How often verdicts and causes are right."""
