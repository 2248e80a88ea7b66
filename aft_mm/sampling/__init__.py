"""From a model's tokens to what a person looks at: images, enlarged images, point clouds.

Hooks, inferencers and tools draw through these functions; they reach a model through its public
methods.
"""
