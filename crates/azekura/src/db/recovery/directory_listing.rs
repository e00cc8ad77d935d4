//! The files of a database directory.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::base::manifest_state::ManifestState;
use crate::base::version_edit::{FileNumber, PartitionId};
use crate::base::{Error, Result};
use crate::db::config::Config;
use crate::manifest::{MANIFEST_NAME, MANIFEST_TEMP_NAME};
use crate::tree::stored_tree;
use crate::vfs::Fs;
use crate::vfs::fs::{DISK_RESERVE_FILE_NAME, LOCK_FILE_NAME};
use crate::vfs::open_files::{DataFileKind, parse_data_file_name};
use crate::wal::format::parse_segment_name;

/// Lengths in bytes of the tables and blob files in the directory.
pub(crate) fn data_files(config: &Config) -> Result<HashMap<(DataFileKind, FileNumber), u64>> {
    list_directory(&*config.fs, &config.path).map(|listing| listing.data)
}

/// Contents of a database directory.
#[derive(Default)]
pub(crate) struct DirectoryListing {
    pub(crate) has_manifest: bool,
    /// Lengths in bytes: of tables and blob files by kind and number, and of WAL segments by number.
    pub(crate) data: HashMap<(DataFileKind, FileNumber), u64>,
    pub(crate) segments: HashMap<FileNumber, u64>,
    /// Files of trees other than tables and blob files.
    pub(crate) tree_files: Vec<(PartitionId, PathBuf)>,
    /// A file name that azekura does not use, if there is one.
    pub(crate) foreign: Option<String>,
}

pub(crate) fn list_directory(fs: &dyn Fs, dir: &Path) -> Result<DirectoryListing> {
    let mut listing = DirectoryListing::default();
    if !fs.exists(dir)? {
        return Ok(listing);
    }
    for entry in fs.read_dir(dir)? {
        if let Some((kind, id)) = parse_data_file_name(&entry.name) {
            listing.data.insert((kind, id), entry.len);
        } else if let Some(id) = parse_segment_name(&entry.name) {
            listing.segments.insert(id, entry.len);
        } else if let Some(partition) = stored_tree::partition_of_file(&entry.name) {
            listing.tree_files.push((partition, dir.join(&entry.name)));
        } else if entry.name == MANIFEST_NAME {
            listing.has_manifest = true;
        } else if ![LOCK_FILE_NAME, DISK_RESERVE_FILE_NAME, MANIFEST_TEMP_NAME].contains(&entry.name.as_str()) {
            listing.foreign.get_or_insert(entry.name);
        }
    }
    Ok(listing)
}

impl DirectoryListing {
    /// Removes files from the listing whose numbers are too high to be from this database.
    pub(crate) fn forget_unowned_files(&mut self, manifest_state: &ManifestState) {
        self.data.retain(|(_, id), _| id.0 < manifest_state.file_number_limit());
        self.segments.retain(|id, _| id.0 < manifest_state.file_number_limit());
        self.tree_files.retain(|(id, _)| id.0 < manifest_state.partition_id_limit());
    }
}

/// Fails for a directory that contains foreign files and no database, or a database whose manifest is missing.
pub(crate) fn check_listing(dir: &Path, listing: &DirectoryListing) -> Result<()> {
    if listing.has_manifest {
        return Ok(());
    }
    if !listing.data.is_empty() || !listing.segments.is_empty() || !listing.tree_files.is_empty() {
        let message = "the manifest is missing, but data files or log segments are here: restore it from a copy";
        return Err(Error::corruption(message).in_file(dir.join(MANIFEST_NAME)));
    }
    match &listing.foreign {
        Some(name) => {
            let message = format!("the directory is no azekura database: it holds {name:?}; choose an empty one");
            Err(Error::invalid(message).in_file(dir))
        }
        None => Ok(()),
    }
}
