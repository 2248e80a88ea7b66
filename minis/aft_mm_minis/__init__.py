"""Weights of small models, which `aft_mm.apis.get_model(NAME, pretrained=True)` reads."""
