//! A read-only view of a file system in which some files have another length or content. The engine opens no database
//! that lacks bytes of a file, but reads the other files if the lost bytes appear as zeros, which no checksum accepts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use azekura::fs::{DirEntry, File, FileLock, Fs, LockMode, Mapping, OpenMode};
use azekura::{Error, ErrorKind, PersistenceLevel, Result};

/// Name of the manifest in a database directory.
pub(super) const MANIFEST_NAME: &str = "MANIFEST";

/// A file system on which the files in `lengths` have these lengths, by name. Bytes that are not on disk are zero.
#[derive(Debug)]
pub(super) struct PaddedFs {
    pub(super) inner: Arc<dyn Fs>,
    pub(super) lengths: BTreeMap<String, u64>,
    /// The content of the manifest, unless it is the one on disk.
    pub(super) manifest: Option<Arc<[u8]>>,
}

impl PaddedFs {
    fn length_of(&self, path: &Path) -> Option<u64> {
        let name = path.file_name()?.to_str()?;
        let manifest = self.manifest.as_ref().filter(|_| name == MANIFEST_NAME);
        manifest.map(|bytes| bytes.len() as u64).or_else(|| self.lengths.get(name).copied())
    }
}

/// A file of another length than on disk.
#[derive(Debug)]
struct PaddedFile {
    content: PaddedContent,
    length: u64,
}

#[derive(Debug)]
enum PaddedContent {
    Missing,
    OnDisk(Arc<dyn File>),
    InMemory(Arc<[u8]>),
}

fn read_only<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Unsupported, "repair does not change the damaged database"))
}

impl Fs for PaddedFs {
    fn open(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        if mode != OpenMode::Read {
            return read_only();
        }
        let Some(length) = self.length_of(path) else { return self.inner.open(path, mode) };
        let content = match &self.manifest {
            Some(bytes) if path.ends_with(MANIFEST_NAME) => PaddedContent::InMemory(Arc::clone(bytes)),
            _ if self.inner.exists(path)? => PaddedContent::OnDisk(self.inner.open(path, mode)?),
            _ => PaddedContent::Missing,
        };
        Ok(Arc::new(PaddedFile { content, length }))
    }

    fn create_dir_all(&self, _: &Path) -> Result<()> {
        read_only()
    }

    fn absolute(&self, path: &Path) -> Result<PathBuf> {
        self.inner.absolute(path)
    }

    fn read_dir(&self, path: &Path) -> Result<Vec<DirEntry>> {
        let mut entries = self.inner.read_dir(path)?;
        entries.retain(|entry| !self.lengths.contains_key(&entry.name));
        let patched = |(name, len): (&String, &u64)| DirEntry { name: name.clone(), len: *len, is_file: true };
        entries.extend(self.lengths.iter().map(patched));
        if let Some(bytes) = &self.manifest {
            entries.retain(|entry| entry.name != MANIFEST_NAME);
            entries.push(DirEntry { name: MANIFEST_NAME.into(), len: bytes.len() as u64, is_file: true });
        }
        Ok(entries)
    }

    fn exists(&self, path: &Path) -> Result<bool> {
        Ok(self.length_of(path).is_some() || self.inner.exists(path)?)
    }

    fn rename(&self, _: &Path, _: &Path) -> Result<()> {
        read_only()
    }

    fn remove_file(&self, _: &Path) -> Result<()> {
        read_only()
    }

    fn remove_dir_all(&self, _: &Path) -> Result<()> {
        read_only()
    }

    fn hard_link(&self, _: &Path, _: &Path) -> Result<()> {
        read_only()
    }

    fn sync_dir(&self, _: &Path) -> Result<()> {
        read_only()
    }

    fn lock(&self, path: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        self.inner.lock(path, mode)
    }

    fn lock_dir(&self, dir: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        self.inner.lock_dir(dir, mode)
    }

    fn overwrites_in_place(&self, dir: &Path) -> bool {
        self.inner.overwrites_in_place(dir)
    }

    fn persistence_level(&self, dir: &Path) -> PersistenceLevel {
        self.inner.persistence_level(dir)
    }
}

impl File for PaddedFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        let wanted = usize::try_from(self.length.saturating_sub(offset)).map_or(buf.len(), |rest| rest.min(buf.len()));
        let buf = &mut buf[..wanted];
        let n = match &self.content {
            PaddedContent::OnDisk(file) => file.read_at(buf, offset)?,
            PaddedContent::InMemory(bytes) => {
                let at = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
                let n = buf.len().min(bytes.len() - at);
                buf[..n].copy_from_slice(&bytes[at..at + n]);
                n
            }
            PaddedContent::Missing => 0,
        };
        buf[n..].fill(0);
        Ok(wanted)
    }

    fn write_at(&self, _: &[u8], _: u64) -> Result<()> {
        read_only()
    }

    fn length(&self) -> Result<u64> {
        Ok(self.length)
    }

    fn set_length(&self, _: u64) -> Result<()> {
        read_only()
    }

    fn allocate(&self, _: u64) -> Result<()> {
        read_only()
    }

    fn sync_data(&self) -> Result<()> {
        read_only()
    }

    fn sync_all(&self) -> Result<()> {
        read_only()
    }

    fn map(&self, _: u64) -> Result<Option<Box<dyn Mapping>>> {
        Ok(None)
    }
}
