"""From a draw to a scored group: the policy as environments see it, rewards, evaluation."""
