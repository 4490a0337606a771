"""ViP-LLaVA for Dal Segno: a LLaVA whose projector reads several layers of the tower."""
