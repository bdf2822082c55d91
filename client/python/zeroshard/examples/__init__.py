"""Programs that show how zeroshard is used."""
