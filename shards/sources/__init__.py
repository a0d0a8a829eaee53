"""One module per dataset, which reads the layout in which the dataset is published.

- `sop` (collect): Stanford Online Products
- `cub200` (collect): CUB-200-2011
- `cars196` (collect): Cars-196, in each of its published forms
- `inshop` (collect): In-Shop Clothes Retrieval
- `folder` (collect): your own images, in folders or a table
- `tables` (collect_table, is_table): images listed in a .csv or .parquet
- `features` (collect): vectors of any encoder, a matrix with a table
- `icons` (collect): icons of the npm package @iconify/json
- `icons_mini` (collect): the part of the icons that comes with the project
- `icons_package` (Icon, read, infos): reads the npm package
- `icons_names` (Language, without_style): the concept in the name of an icon
- `icons_drawing` (ink, png): draws an icon from its SVG
- `icons_twins` (twins, synonyms): drawings that look the same
- `layout` (need, need_folder, relative, rows): what the published layouts have in common
"""
