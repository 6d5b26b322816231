"""Any game of textarena, the policy against itself."""
