//! Checks a whole blob file: every byte, every count.

use crate::base::compression::decompress;
use crate::base::version_edit::BlobFileMeta;
use crate::base::{Error, Result};
use crate::blob::reader::{BlobFile, BlobReadAhead};

impl BlobFile {
    /// Reads all of the file, past the cache, and compares it with what the manifest says; gives the number of values.
    ///
    /// # Errors
    /// `Corruption` with file and offset of the first thing that is wrong.
    pub(crate) fn verify(&self, meta: &BlobFileMeta) -> Result<u64> {
        self.verify_sections(meta).map_err(|error| error.in_file(self.path()))
    }

    fn verify_sections(&self, meta: &BlobFileMeta) -> Result<u64> {
        let opened = self.head()?;
        // Header, footer and directory are read again: they may have changed since.
        let again = self.read_head()?;
        if (again.file_id, &again.metaindex) != (opened.file_id, &opened.metaindex) {
            return Err(Error::corruption("file is not the one that was opened"));
        }
        let directory = &opened.metaindex;
        if directory.section_metas() != meta.sections || directory.created_ms != meta.created_ms {
            return Err(Error::corruption("blob file has other values than the manifest says"));
        }
        let (mut ahead, mut raw) = (BlobReadAhead::eager(), Vec::new());
        for section in &directory.sections {
            let mut iter = self.section_iter(section.logical)?;
            let (mut values, mut last) = (0u64, None);
            while let Some((ordinal, handle)) = iter.next()? {
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
            let ends = last.is_some_and(|handle| handle.end().is_ok_and(|end| end == section.end_offset()));
            if values != section.value_count || !ends {
                return Err(Error::corruption("section has other values than the directory says"));
            }
        }
        Ok(directory.sections.iter().map(|section| section.value_count).sum())
    }
}
