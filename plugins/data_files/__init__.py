"""Readers of data in tables (CSV, Parquet, Arrow), in folders and on the Hugging Face hub."""

PROVIDES = {
    "data file": dict.fromkeys(("csv", "parquet", "arrow"), "tables:read_table"),
    "data records": {"folder": "folders:read_folder", "hub": "hub:read_hub"},
}
