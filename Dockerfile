# The azekura command without anything else, 2 MB. Build the binary first:
#   cargo build --release --locked --target x86_64-unknown-linux-musl -p azekura-cli
#   docker build -t azekura .
#   docker run --rm -v "$PWD/my.db:/db" azekura stats --db /db
FROM scratch
COPY target/x86_64-unknown-linux-musl/release/azekura /azekura
COPY LICENSE-MIT LICENSE-APACHE /
ENTRYPOINT ["/azekura"]
