//! stub
use crate::base::edit::PartitionId;
use crate::base::{Result, SeqNo};
use crate::pmem::medium::Image;
use crate::vfs::Fs;
use std::path::Path;
use std::sync::Arc;
pub(crate) struct ImageStore {}
pub(crate) struct Loaded {
    pub(crate) image: Image,
    pub(crate) replay_from: SeqNo,
    pub(crate) highest: SeqNo,
}
pub(crate) struct Written {
    pub(crate) bytes: u64,
}
impl ImageStore {
    pub(crate) fn open(
        _fs: &Arc<dyn Fs>,
        _dir: &Path,
        _partition: PartitionId,
        _len_max: u64,
        _never_written: bool,
        _read_only: bool,
    ) -> Result<(ImageStore, Option<Loaded>)> {
        Ok((ImageStore {}, None))
    }
    pub(crate) fn checkpoint(
        &self,
        _image: &Image,
        cut: &mut dyn FnMut() -> SeqNo,
        make_durable: &mut dyn FnMut(SeqNo) -> Result<SeqNo>,
    ) -> Result<Written> {
        let a = cut();
        make_durable(a)?;
        Ok(Written { bytes: 0 })
    }
    pub(crate) fn copy_to(&self, _dir: &Path) -> Result<()> {
        Ok(())
    }
    pub(crate) fn disk_bytes(&self) -> u64 {
        0
    }
    pub(crate) fn path(&self) -> &Path {
        Path::new("")
    }
}
