"""A page to look at a run: its errors, its classes, its labels, and a map of its embeddings.

- `program` (main): the command `dml look`
- `images` (Gallery, gallery_of): which images the page shows, and who searches whom
- `findings` (Findings, findings): neighbours, confused classes, likely label errors
- `copies` (near_duplicates): images that are almost the same in different classes or splits
- `layout` (layout): the map, embeddings in two dimensions
- `sheets` (Sheets): thumbnails, many to a file
- `page` (write_page): the folder that a browser opens
- `serve` (Server): the same page with a field for a photo
"""
