//! A directory becomes entries: path → content.

use std::fs;
use std::path::Path;

use walkdir::{DirEntry, WalkDir};

use crate::args::MapArgs;
use crate::command::transfer::load::Load;
use crate::command::transfer::moved::Moved;
use crate::display;
use crate::failure::{Failure, Result};
use crate::path_key;
use crate::progress::Progress;

/// Stores every regular file below `source`; what cannot be read is left out.
pub(crate) fn import(source: &Path, map: &MapArgs, json: bool) -> Result<Moved> {
    if !source.is_dir() {
        return Err(Failure::Input { file: source.to_path_buf(), message: "not a directory".into() });
    }
    let mut load = Load::new(map, Progress::spinner(json, "Importing"));
    // The database may stand inside the directory, also if it is created on the way; it does not swallow itself.
    let is_own = |entry: &DirEntry| {
        let own = || fs::canonicalize(&map.db.path).ok();
        entry.file_type().is_dir() && fs::canonicalize(entry.path()).is_ok_and(|dir| own() == Some(dir))
    };
    for entry in WalkDir::new(source).sort_by_file_name().into_iter().filter_entry(|entry| !is_own(entry)) {
        match entry {
            Ok(entry) if entry.file_type().is_file() => import_file(entry.path(), source, &mut load)?,
            Ok(_) => {}
            Err(error) => {
                let name = error.path().unwrap_or(source).display().to_string();
                load.leave_out(name, error.into_io_error().map_or("a loop of links".into(), |e| e.to_string()));
            }
        }
    }
    load.finish()
}

fn import_file(path: &Path, source: &Path, load: &mut Load<'_>) -> Result<()> {
    let name = || path.display().to_string();
    let length = path.metadata().map_or(0, |data| data.len());
    if length > u64::from(u32::MAX) {
        load.leave_out(name(), format!("{} are more than a value can hold", display::bytes(length)));
        return Ok(());
    }
    match fs::read(path) {
        Ok(content) => {
            load.progress().add(1);
            load.progress().message(name());
            load.put(&path_key::of(path, source), &content, name)
        }
        Err(error) => {
            load.leave_out(name(), error.to_string());
            Ok(())
        }
    }
}
