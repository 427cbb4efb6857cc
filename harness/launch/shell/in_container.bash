# --no-container-mount-home: packages in ~/.local would hide those of the image. --container-env: variables that the
# image sets too take the job's values.
container=(@container@)
# Only the image has the harness. --overlap: an earlier step may still be ending.
on_first_node=(srun --nodes=1 --ntasks=1 --relative=0 --overlap "${container[@]}")
