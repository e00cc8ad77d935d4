//! `import` and `export`: entries as a directory or as JSON lines, byte for byte both ways.
//!
//! Rooms: `import`, `export`, `moved` (what was done, and what had to be left out), `load` (batches of puts),
//! `from_dir`, `from_lines`, `to_dir`, `to_lines`.

mod export;
mod from_dir;
mod from_lines;
mod import;
mod load;
mod moved;
mod to_dir;
mod to_lines;

pub(crate) use export::export;
pub(crate) use import::import;
