//! `import` and `export`: entries as a directory, CSV, JSON lines or a native file, byte for byte in both directions.
//!
//! Reading order: `run` (the two commands), `loader` (stores entries in batches), `writer` (the target of an export),
//! `directory`, `csv_format`, `json_lines`, `native` (the formats), `text_fields` (encodings of CSV and JSON lines),
//! `report` (what the commands print), `peer` (databases of other engines, behind Cargo features).

mod csv_format;
mod directory;
mod json_lines;
mod loader;
mod native;
#[cfg(feature = "_peer")]
mod peer;
mod report;
mod run;
mod text_fields;
mod writer;

pub(crate) use loader::{EntryLoader, LoadMode, LoadedExpiry};
pub(crate) use run::{export, import};
