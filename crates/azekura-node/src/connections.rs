//! Limits the number of connections, so that the database can always open files, and closes those whose peers read
//! nothing, because answers to them take memory.

use axum::{Extension, Router};
use axum_server::accept::Accept;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::Sleep;

/// A connection is closed if its peer takes nothing of an answer for this time.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Lets the process open as many files as the system allows, and returns the number of connections: half of them.
pub(crate) fn max() -> usize {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // A failure leaves the limit as it was.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let files = getrlimit(Resource::Nofile).current.or(current);
    let connections = files.map_or(Semaphore::MAX_PERMITS, |files| usize::try_from(files / 2).unwrap_or(usize::MAX));
    connections.min(Semaphore::MAX_PERMITS)
}

/// Closes connections beyond a number, and those that take no answers.
#[derive(Clone, Debug)]
pub(crate) struct LimitedAcceptor<A> {
    acceptor: A,
    connections: Arc<Semaphore>,
}

impl<A> LimitedAcceptor<A> {
    pub(crate) fn new(acceptor: A, connections: usize) -> LimitedAcceptor<A> {
        LimitedAcceptor { acceptor, connections: Arc::new(Semaphore::new(connections)) }
    }
}

impl<A: Accept<TcpStream, Router>> Accept<TcpStream, Router> for LimitedAcceptor<A>
where
    A::Future: Send + 'static,
{
    type Stream = TimedStream<A::Stream>;
    type Service = A::Service;
    type Future = Pin<Box<dyn Future<Output = io::Result<(TimedStream<A::Stream>, A::Service)>> + Send>>;

    fn accept(&self, stream: TcpStream, router: Router) -> Self::Future {
        let Ok(permit) = Arc::clone(&self.connections).try_acquire_owned() else {
            return Box::pin(async { Err(io::Error::other("too many connections")) });
        };
        // The connection has the router until it ends.
        let accepted = self.acceptor.accept(stream, router.layer(Extension(Arc::new(permit))));
        Box::pin(async {
            let (stream, service) = accepted.await?;
            Ok((TimedStream { stream, deadline: None }, service))
        })
    }
}

/// A connection that fails if its peer takes nothing for [`WRITE_TIMEOUT`].
#[derive(Debug)]
pub(crate) struct TimedStream<S> {
    stream: S,
    /// While a write waits.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<S: AsyncWrite + Unpin> TimedStream<S> {
    fn timed<T>(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut S>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if let Poll::Ready(written) = write(Pin::new(&mut self.stream), cx) {
            self.deadline = None;
            return Poll::Ready(written);
        }
        let deadline = self.deadline.get_or_insert_with(|| Box::pin(tokio::time::sleep(WRITE_TIMEOUT)));
        deadline.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.timed(cx, |stream, cx| stream.poll_write(cx, buf))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.timed(cx, |stream, cx| stream.poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.timed(cx, |stream, cx| stream.poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.timed(cx, |stream, cx| stream.poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use super::TimedStream;
    use std::io::ErrorKind;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    #[tokio::test(start_paused = true)]
    async fn peer_that_reads_nothing_is_cut_off() {
        let (stream, mut peer) = tokio::io::duplex(8);
        let mut stream = TimedStream { stream, deadline: None };
        stream.write_all(b"12345678").await.unwrap();
        peer.read_exact(&mut [0; 4]).await.unwrap();
        stream.write_all(b"1234").await.unwrap();
        assert_eq!(stream.write_all(b"5").await.unwrap_err().kind(), ErrorKind::TimedOut);
    }
}
