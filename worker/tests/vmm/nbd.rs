//! A disk behind NBD, for one machine at a time: its server can go away and come back.
//!
//! Owns as much of the protocol as QEMU asks for (<https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>).

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

const OPTION: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const GO: u32 = 7;
const UNSUPPORTED: u32 = 1 << 31 | 1;
/// There are flags, and flushes and trims are understood.
const FLAGS: u16 = 1 | 4 | 32;

/// A server.
pub struct Server {
    bytes: Arc<Mutex<Vec<u8>>>,
    connections: Arc<Mutex<Vec<UnixStream>>>,
}

impl Server {
    /// Serves these bytes at `socket`, which anybody may connect to who reaches it.
    pub fn start(socket: &Path, bytes: Vec<u8>) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        std::fs::set_permissions(socket, PermissionsExt::from_mode(0o777)).unwrap();
        let server = Self { bytes: Arc::new(Mutex::new(bytes)), connections: Arc::default() };
        let (bytes, connections) = (server.bytes.clone(), server.connections.clone());
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                connections.lock().unwrap().push(stream.try_clone().unwrap());
                let bytes = bytes.clone();
                std::thread::spawn(move || serve(stream, &bytes));
            }
        });
        server
    }

    /// Ends it as a crash does; what was written stays.
    pub fn stop(self, socket: &Path) -> Vec<u8> {
        std::fs::remove_file(socket).unwrap();
        for connection in self.connections.lock().unwrap().iter() {
            let _ = connection.shutdown(Shutdown::Both);
        }
        self.bytes.lock().unwrap().clone()
    }
}

fn serve(mut stream: UnixStream, bytes: &Mutex<Vec<u8>>) -> io::Result<()> {
    let size = bytes.lock().unwrap().len() as u64;
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    take::<4>(&mut stream)?;
    loop {
        assert_eq!(u64::from_be_bytes(take(&mut stream)?), OPTION);
        let option: [u8; 4] = take(&mut stream)?;
        let mut data = vec![0; u32::from_be_bytes(take(&mut stream)?) as usize];
        stream.read_exact(&mut data)?;
        let reply = |kind: u32, data: &[u8]| {
            [&OPTION_REPLY.to_be_bytes()[..], &option, &kind.to_be_bytes(), &u32::try_from(data.len()).unwrap().to_be_bytes(), data]
                .concat()
        };
        if u32::from_be_bytes(option) != GO {
            stream.write_all(&reply(UNSUPPORTED, &[]))?;
            continue;
        }
        let export = [&[0, 0][..], &size.to_be_bytes(), &FLAGS.to_be_bytes()].concat();
        stream.write_all(&[reply(3, &export), reply(1, &[])].concat())?;
        break;
    }
    loop {
        let request: [u8; 28] = take(&mut stream)?;
        let (kind, cookie) = (request[7], &request[8..16]);
        let from = u64::from_be_bytes(request[16..24].try_into().unwrap()) as usize;
        let len = u32::from_be_bytes(request[24..28].try_into().unwrap()) as usize;
        let mut reply = [&0x6744_6698_u32.to_be_bytes()[..], &[0; 4], cookie].concat();
        match kind {
            0 => reply.extend_from_slice(&bytes.lock().unwrap()[from..from + len]),
            1 => {
                let mut data = vec![0; len];
                stream.read_exact(&mut data)?;
                bytes.lock().unwrap()[from..from + len].copy_from_slice(&data);
            }
            2 => return Ok(()),
            _ => {}
        }
        stream.write_all(&reply)?;
    }
}

fn take<const N: usize>(stream: &mut UnixStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
