//! Checks a whole blob file: every byte, every count.

use crate::base::compression::decompress;
use crate::base::edit::BlobMeta;
use crate::base::{Error, Result};
use crate::blob::reader::{BlobFile, ValuesAhead};

impl BlobFile {
    /// Reads all of the file, past the cache, and compares it with what the manifest says; gives the number of values.
    ///
    /// # Errors
    /// `Corruption` with file and offset of the first thing that is wrong.
    pub(crate) fn verify(&self, meta: &BlobMeta) -> Result<u64> {
        self.check(meta).map_err(|error| error.in_file(self.path()))
    }

    fn check(&self, meta: &BlobMeta) -> Result<u64> {
        let opened = self.opened()?;
        // Header, footer and directory are read again: they may have changed since.
        let again = self.open()?;
        if (again.file_id, &again.directory) != (opened.file_id, &opened.directory) {
            return Err(Error::corruption("file is not the one that was opened"));
        }
        let directory = &opened.directory;
        if directory.summary() != meta.sections || directory.created_ms != meta.created_ms {
            return Err(Error::corruption("blob file has other values than the manifest says"));
        }
        let (mut ahead, mut raw) = (ValuesAhead::eager(), Vec::new());
        for section in &directory.sections {
            let mut walk = self.walk(section.logical)?;
            let (mut values, mut last) = (0u64, None);
            while let Some((ordinal, handle)) = walk.next()? {
                if !section.rewritten && u64::from(ordinal) != values {
                    return Err(Error::corruption("an ordinal of the blob file is missing").at_offset(handle.offset));
                }
                self.with_frame(handle, &mut ahead, |frame| {
                    raw.clear();
                    raw.resize(frame.raw_len, 0);
                    decompress(frame.codec, frame.stored, &mut raw)
                })?;
                values += 1;
                last = Some(handle);
            }
            let ends = last.is_some_and(|handle| handle.end().is_ok_and(|end| end == section.end()));
            if values != section.values || !ends {
                return Err(Error::corruption("section has other values than the directory says"));
            }
        }
        Ok(directory.sections.iter().map(|section| section.values).sum())
    }
}
