// What Go's sumdb packages make of a log, and a log of their own making: see tests/test_tlog_interop.py.
//
//	main read  < request.json   open a checkpoint, read tiles through TileHashReader, prove, check proofs
//	main proof < request.json   check a c2sp.org/tlog-proof of one entry
//	main write < request.json   write tiles and bundles of given entries, sign and cosign a checkpoint
package main

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

type request struct {
	Dir        string
	LogKey     string // verifier key (read)
	Witness    string // name of a witness
	WitnessKey []byte // its public key (read), or its seed (write)
	Name       string // the log's (write)
	Seed       []byte // the log's key (write)
	Entries    [][]byte
	Time       uint64
	Inclusion  []inclusion
	Growth     []growth
}

type inclusion struct {
	Index int64
	Proof []tlog.Hash
}

type growth struct {
	Old     int64
	OldRoot tlog.Hash
	Proof   []tlog.Hash
}

type answer struct {
	Text       string
	Verified   []string
	Unverified int
	Size       int64
	Root       tlog.Hash
	Inclusion  []inclusion
	Growth     []growth
	Entries    [][]byte
	Tiles      []string
	LogKey     string
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func path(t tlog.Tile) string {
	name := strings.Replace(t.Path(), "tile/8/", "tile/", 1)
	return strings.Replace(name, "tile/data/", "tile/entries/", 1)
}

type folder struct{ dir string }

func (f folder) Height() int { return 8 }
func (f folder) ReadTiles(tiles []tlog.Tile) ([][]byte, error) {
	var found [][]byte
	for _, t := range tiles {
		data, err := os.ReadFile(filepath.Join(f.dir, path(t)))
		if err != nil {
			return nil, err
		}
		found = append(found, data)
	}
	return found, nil
}
func (f folder) SaveTiles([]tlog.Tile, [][]byte) {}

// A cosigner (signature type 4): what sumdb/note calls for a key that is not its own.
type cosigner struct {
	name string
	hash uint32
	key  ed25519.PublicKey
	priv ed25519.PrivateKey
	time uint64
}

func newCosigner(name string, key ed25519.PublicKey) cosigner {
	sum := sha256.Sum256(append([]byte(name+"\n\x04"), key...))
	return cosigner{name: name, hash: binary.BigEndian.Uint32(sum[:]), key: key}
}

func statement(t uint64, msg []byte) []byte {
	return append([]byte(fmt.Sprintf("cosignature/v1\ntime %d\n", t)), msg...)
}
func (c cosigner) Name() string    { return c.name }
func (c cosigner) KeyHash() uint32 { return c.hash }
func (c cosigner) Verify(msg, sig []byte) bool {
	return len(sig) == 72 && ed25519.Verify(c.key, statement(binary.BigEndian.Uint64(sig), msg), sig[8:])
}
func (c cosigner) Sign(msg []byte) ([]byte, error) {
	return append(binary.BigEndian.AppendUint64(nil, c.time), ed25519.Sign(c.priv, statement(c.time, msg))...), nil
}

func read(req request) answer {
	var ans answer
	msg, err := os.ReadFile(filepath.Join(req.Dir, "checkpoint"))
	must(err)
	log, err := note.NewVerifier(req.LogKey)
	must(err)
	known := []note.Verifier{log}
	if req.Witness != "" {
		known = append(known, newCosigner(req.Witness, req.WitnessKey))
	}
	opened, err := note.Open(msg, note.VerifierList(known...))
	must(err)
	ans.Text = opened.Text
	for _, sig := range opened.Sigs {
		ans.Verified = append(ans.Verified, sig.Name)
	}
	ans.Unverified = len(opened.UnverifiedSigs)
	lines := strings.Split(opened.Text, "\n")
	ans.Size, err = strconv.ParseInt(lines[1], 10, 64)
	must(err)
	ans.Root, err = tlog.ParseHash(lines[2])
	must(err)
	if ans.Size == 0 {
		return ans
	}
	hashes := tlog.TileHashReader(tlog.Tree{N: ans.Size, Hash: ans.Root}, folder{req.Dir})
	root, err := tlog.TreeHash(ans.Size, hashes)
	must(err)
	if root != ans.Root {
		must(fmt.Errorf("tiles give another root"))
	}
	for n := int64(0); n < ans.Size; n += 256 {
		t := tlog.Tile{H: 8, L: -1, N: n / 256, W: 256}
		if ans.Size-n < 256 {
			t.W = int(ans.Size - n)
		}
		data, err := os.ReadFile(filepath.Join(req.Dir, path(t)))
		must(err)
		for len(data) > 0 {
			size := int(binary.BigEndian.Uint16(data))
			ans.Entries = append(ans.Entries, data[2:2+size])
			data = data[2+size:]
		}
	}
	leaves := make([]tlog.Hash, len(ans.Entries))
	for i, entry := range ans.Entries {
		leaves[i] = tlog.RecordHash(entry)
		index := []int64{tlog.StoredHashIndex(0, int64(i))}
		stored, err := hashes.ReadHashes(index)
		must(err)
		if stored[0] != leaves[i] {
			must(fmt.Errorf("entry %d is not the one in the tiles", i))
		}
	}
	for _, item := range req.Inclusion {
		must(tlog.CheckRecord(item.Proof, ans.Size, ans.Root, item.Index, leaves[item.Index]))
		proof, err := tlog.ProveRecord(ans.Size, item.Index, hashes)
		must(err)
		ans.Inclusion = append(ans.Inclusion, inclusion{item.Index, proof})
	}
	for _, item := range req.Growth {
		must(tlog.CheckTree(item.Proof, ans.Size, ans.Root, item.Old, item.OldRoot))
		proof, err := tlog.ProveTree(ans.Size, item.Old, hashes)
		must(err)
		ans.Growth = append(ans.Growth, growth{item.Old, item.OldRoot, proof})
	}
	for _, t := range tlog.NewTiles(8, 0, ans.Size) {
		ans.Tiles = append(ans.Tiles, path(t))
	}
	return ans
}

// proof checks DIR/proof, a c2sp.org/tlog-proof, for Entries[0]: nothing of its extra line is read.
func proof(req request) answer {
	var ans answer
	data, err := os.ReadFile(filepath.Join(req.Dir, "proof"))
	must(err)
	head, msg, found := bytes.Cut(data, []byte("\n\n"))
	lines := strings.Split(string(head), "\n")
	if !found || lines[0] != "c2sp.org/tlog-proof@v1" {
		must(fmt.Errorf("no proof of this version"))
	}
	lines = lines[1:]
	if strings.HasPrefix(lines[0], "extra ") {
		lines = lines[1:]
	}
	index, err := strconv.ParseInt(strings.TrimPrefix(lines[0], "index "), 10, 64)
	must(err)
	var path []tlog.Hash
	for _, line := range lines[1:] {
		hash, err := tlog.ParseHash(line)
		must(err)
		path = append(path, hash)
	}
	log, err := note.NewVerifier(req.LogKey)
	must(err)
	opened, err := note.Open(msg, note.VerifierList(log, newCosigner(req.Witness, req.WitnessKey)))
	must(err)
	ans.Text = opened.Text
	for _, sig := range opened.Sigs {
		ans.Verified = append(ans.Verified, sig.Name)
	}
	tree := strings.Split(opened.Text, "\n")
	ans.Size, err = strconv.ParseInt(tree[1], 10, 64)
	must(err)
	ans.Root, err = tlog.ParseHash(tree[2])
	must(err)
	must(tlog.CheckRecord(path, ans.Size, ans.Root, index, tlog.RecordHash(req.Entries[0])))
	ans.Inclusion = []inclusion{{index, path}}
	return ans
}

func write(req request) answer {
	var ans answer
	var stored []tlog.Hash
	reader := tlog.HashReaderFunc(func(indexes []int64) ([]tlog.Hash, error) {
		var found []tlog.Hash
		for _, i := range indexes {
			found = append(found, stored[i])
		}
		return found, nil
	})
	for i, entry := range req.Entries {
		more, err := tlog.StoredHashes(int64(i), entry, reader)
		must(err)
		stored = append(stored, more...)
	}
	ans.Size = int64(len(req.Entries))
	save := func(t tlog.Tile, data []byte) {
		name := filepath.Join(req.Dir, path(t))
		must(os.MkdirAll(filepath.Dir(name), 0o755))
		must(os.WriteFile(name, data, 0o644))
		ans.Tiles = append(ans.Tiles, path(t))
	}
	for _, t := range tlog.NewTiles(8, 0, ans.Size) {
		data, err := tlog.ReadTileData(t, reader)
		must(err)
		save(t, data)
		if t.L == 0 {
			var bundle bytes.Buffer
			for i := 0; i < t.W; i++ {
				entry := req.Entries[t.N*256+int64(i)]
				must(binary.Write(&bundle, binary.BigEndian, uint16(len(entry))))
				bundle.Write(entry)
			}
			save(tlog.Tile{H: 8, L: -1, N: t.N, W: t.W}, bundle.Bytes())
		}
	}
	var err error
	ans.Root, err = tlog.TreeHash(ans.Size, reader)
	must(err)
	for i := range req.Entries {
		proof, err := tlog.ProveRecord(ans.Size, int64(i), reader)
		must(err)
		ans.Inclusion = append(ans.Inclusion, inclusion{int64(i), proof})
		root, err := tlog.TreeHash(int64(i+1), reader)
		must(err)
		grown, err := tlog.ProveTree(ans.Size, int64(i+1), reader)
		must(err)
		ans.Growth = append(ans.Growth, growth{int64(i + 1), root, grown})
	}
	private := ed25519.NewKeyFromSeed(req.Seed)
	public := private.Public().(ed25519.PublicKey)
	ans.LogKey, err = note.NewEd25519VerifierKey(req.Name, public)
	must(err)
	hash := strings.Split(ans.LogKey, "+")[1]
	secret := base64.StdEncoding.EncodeToString(append([]byte{1}, req.Seed...))
	log, err := note.NewSigner("PRIVATE+KEY+" + req.Name + "+" + hash + "+" + secret)
	must(err)
	witness := ed25519.NewKeyFromSeed(req.WitnessKey)
	other := newCosigner(req.Witness, witness.Public().(ed25519.PublicKey))
	other.priv, other.time = witness, req.Time
	ans.Text = fmt.Sprintf("%s\n%d\n%s\n", req.Name, ans.Size, ans.Root)
	signed, err := note.Sign(&note.Note{Text: ans.Text}, log, other)
	must(err)
	must(os.WriteFile(filepath.Join(req.Dir, "checkpoint"), signed, 0o644))
	for _, item := range ans.Inclusion {
		text := fmt.Sprintf("c2sp.org/tlog-proof@v1\nindex %d\n", item.Index)
		for _, hash := range item.Proof {
			text += hash.String() + "\n"
		}
		name := filepath.Join(req.Dir, fmt.Sprintf("%d.tlog-proof", item.Index))
		must(os.WriteFile(name, append([]byte(text+"\n"), signed...), 0o644))
	}
	return ans
}

func main() {
	var req request
	must(json.NewDecoder(os.Stdin).Decode(&req))
	var ans answer
	if os.Args[1] == "read" {
		ans = read(req)
	} else if os.Args[1] == "proof" {
		ans = proof(req)
	} else {
		ans = write(req)
	}
	must(json.NewEncoder(os.Stdout).Encode(ans))
}
