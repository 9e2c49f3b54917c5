"""Losses: sums and weights of cross-entropies and preferences, over tokens or pairs."""
