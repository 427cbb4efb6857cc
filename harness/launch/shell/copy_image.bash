# Once per node: a part that an earlier attempt copied is continued, and the whole must have the hash of the original.
copy_image='
  stamp=$(stat -L -c %s-%Y "$1") && mkdir -p "${2%/*}" && exec 9>"$2.lock" && flock 9 || exit 1
  [[ ! -s $2 || $(cat "$2.copied" 2>/dev/null) != "$stamp" ]] || exit 0
  rm -f "$2.copied" "$2"
  for old in "$2".*.partial; do [[ $old == "$2.$stamp.partial" ]] || rm -f "$old"; done
  for try in 1 2; do
    tail -c "+$(($(stat -c %s "$2.$stamp.partial" 2>/dev/null || echo 0) + 1))" "$1" >>"$2.$stamp.partial" || exit 1
    [[ $(sha256sum <"$2.$stamp.partial") != "$3  -" ]] || break
    rm "$2.$stamp.partial"
    [[ $try == 1 ]] || { echo "the copy of $1 has another hash than the original" >&2; exit 1; }
  done
  mv "$2.$stamp.partial" "$2" && echo "$stamp" >"$2.copied"'
# Where one node cannot have the image on its disk, all read it where it is.
image=@image@
image_hash=$(cut -d ' ' -f 1 "$image.sha256" 2>/dev/null) || image_hash=$(sha256sum <"$image" | cut -d ' ' -f 1)
srun --input=none --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --label \
  bash -c "$copy_image" copy "$image" "@local@$image" "$image_hash" &
copying=$!
while kill -0 "$copying" 2>/dev/null; do wait "$copying"; done
if wait "$copying"; then
  image=@local@$image
else
  echo "not every node could copy the image to @local@: it is read from $image"
fi
container+=(--container-image="$image")
on_first_node+=(--container-image="$image")
on_each_node+=(--container-image="$image")
on_each_rank+=(--container-image="$image")
